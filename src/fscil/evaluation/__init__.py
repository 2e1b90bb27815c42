"""What a run is worth: metrics, tables, figures and the HTML report."""
