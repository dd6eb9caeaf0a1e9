"""REST tools: tools that are one HTTP request each, and the HTTP client that sends the requests.

`provider` lists and runs the tools. `request_builder`, `url_template` and `template` compile a tool's templates into
requests. `client` and `transport` send them. `response` and `stream_formats` turn responses into results. The OpenAPI
provider and configured tools use this package too. It imports only `toolspace.core` and `toolspace.errors`.
"""
