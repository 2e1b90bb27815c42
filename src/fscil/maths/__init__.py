"""The equations, as pure functions on tensors: each is tested against its obvious slow form."""
