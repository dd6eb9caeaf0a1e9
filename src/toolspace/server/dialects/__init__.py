"""The dialects of streams: `ai_sdk` and `ag_ui` translate events to these protocols; `base` has what they share.

`sse_encoding` lists the dialects and uses them. They send nothing, and import core records only.
"""
