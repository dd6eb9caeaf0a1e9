"""Services of the gateway: entities, spaces, messages, inbox, runs, calls. They know no HTTP."""
