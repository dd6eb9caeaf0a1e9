"""What every agent can do: be in spaces, speak, look into its inbox, keep goals and memories. Runs in the gateway."""
