"""Services that an OpenAPI document describes, as providers of tools."""
