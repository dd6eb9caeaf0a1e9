"""Services described by OpenAPI documents, as providers: every operation is a tool.

`document` loads the document and resolves references; `operations` reads the operations with `inputs` (parameters and
bodies), `schemas` and `security`; `request_builder` compiles an operation into requests; `provider` puts them together.
Requests are sent by `toolspace.providers.rest`. It imports only that package, `toolspace.core` and `toolspace.errors`.
"""
