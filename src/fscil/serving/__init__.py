"""A model behind a web page or an HTTP interface."""
