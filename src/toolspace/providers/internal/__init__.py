"""The agent's own tools, `agent__…`: report, status, batch, reading stored outputs, finding tools."""
