"""REST tools: tools that are one HTTP request each, and the HTTP client that sends the requests.

`provider` lists and runs the tools. `request_builder` and `templates` compile templates into requests. `client` and
`redirects_and_retries` send them. `response` turns responses into results. The OpenAPI provider and configured tools
use this package too. It imports only `toolspace.core` and `toolspace.errors`.
"""
