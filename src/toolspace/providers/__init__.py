"""Where tools come from: functions, the internal tools, and what configuration declares."""
