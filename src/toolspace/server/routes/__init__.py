"""What the gateway answers, one module per resource; each has its `ROUTES`."""
