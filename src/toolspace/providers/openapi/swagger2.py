"""Converts Swagger 2.0 documents to OpenAPI 3.0, so that the rest of this package reads only that.

References into `definitions` stay as they are, and so does that part of the document. Path items in other files are not
converted. What OpenAPI 3.0 cannot express is left as it is, and the operation is left out with that reason.
"""

from __future__ import annotations

from typing import Any

from toolspace.core.json_data import JsonObject, as_list, as_object

_METHODS = ("get", "put", "post", "delete", "options", "head", "patch")
_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"
_PARAMETER_KEYS = frozenset(("name", "in", "description", "required", "allowEmptyValue", "collectionFormat"))
_STYLES: dict[str, tuple[str, bool]] = {
    "csv": ("form", False),
    "ssv": ("spaceDelimited", False),
    "pipes": ("pipeDelimited", False),
    "multi": ("form", True),
    "tsv": ("tabDelimited", False),  # No style of OpenAPI 3: the operation is left out.
}
_FLOWS = {
    "implicit": "implicit",
    "password": "password",
    "application": "clientCredentials",
    "accessCode": "authorizationCode",
}


def convert_swagger(document: JsonObject) -> JsonObject:
    """Returns an OpenAPI 3.0 document that means the same. Does not change the document."""
    return _Swagger(document).convert()


class _Swagger:
    def __init__(self, document: JsonObject) -> None:
        self._document = document

    def convert(self) -> JsonObject:
        document = self._document
        result: JsonObject = {
            key: document[key] for key in ("info", "tags", "externalDocs", "security") if key in document
        }
        result["openapi"] = "3.0.3"
        servers = self._servers(document.get("schemes"))
        if servers:
            result["servers"] = servers
        result["definitions"] = _convert_schema(document.get("definitions") or {})
        result["responses"] = {
            name: self._response(response, document.get("produces"))
            for name, response in (as_object(document.get("responses")) or {}).items()
        }
        result["paths"] = {
            path: self._path_item(item) for path, item in (as_object(document.get("paths")) or {}).items()
        }
        schemes = as_object(document.get("securityDefinitions")) or {}
        result["components"] = {"securitySchemes": {name: _security_scheme(node) for name, node in schemes.items()}}
        return result

    def _servers(self, schemes: Any) -> list[JsonObject]:
        """HTTPS first. A document without schemes or a host means those of its own URL."""
        base_path = str(self._document.get("basePath") or "/")
        host = self._document.get("host")
        if not isinstance(host, str) or not host:
            return [{"url": base_path}]
        names = [scheme for scheme in as_list(schemes) if scheme in ("http", "https")]
        prefixes = [f"{scheme}:" for scheme in sorted(names, reverse=True)] or [""]
        return [{"url": f"{prefix}//{host}{base_path if base_path != '/' else ''}"} for prefix in prefixes]

    def _path_item(self, item: Any) -> Any:
        path_item = as_object(item)
        if path_item is None:
            return item
        result = {key: value for key, value in path_item.items() if key not in (*_METHODS, "parameters")}
        for method in _METHODS:
            if (operation := as_object(path_item.get(method))) is not None:
                result[method] = self._operation(operation, as_list(path_item.get("parameters")))
        return result

    def _operation(self, operation: JsonObject, shared_parameters: list[Any]) -> JsonObject:
        moved_keys = ("parameters", "consumes", "produces", "responses", "schemes")
        result = {key: value for key, value in operation.items() if key not in moved_keys}
        parameters: dict[Any, Any] = {}
        for node in (*shared_parameters, *as_list(operation.get("parameters"))):
            parameter = self._resolve(node)
            fields = as_object(parameter)
            key = (fields.get("in"), fields.get("name")) if fields is not None and "name" in fields else id(parameter)
            parameters[key] = parameter
        consumes = self._media_types(operation, "consumes")
        body = [node for node in parameters.values() if _location(node) == "body"]
        form_fields = [node for node in parameters.values() if _location(node) == "formData"]
        result["parameters"] = [
            _parameter(node) for node in parameters.values() if _location(node) not in ("body", "formData")
        ]
        if body:
            result["requestBody"] = _body(body[0], consumes)
        elif form_fields:
            result["requestBody"] = _form(form_fields, consumes)
        produces = self._media_types(operation, "produces")
        result["responses"] = {
            status: self._response(response, produces)
            for status, response in (as_object(operation.get("responses")) or {}).items()
        }
        if operation.get("schemes"):
            result["servers"] = self._servers(operation["schemes"])
        return result

    def _media_types(self, operation: JsonObject, key: str) -> list[str]:
        names = operation[key] if key in operation else self._document.get(key)
        return [name for name in as_list(names) if isinstance(name, str)] or [_JSON]

    def _resolve(self, node: Any) -> Any:
        """Follows a reference to a parameter of the document; other references stay."""
        for _ in range(8):
            reference = (as_object(node) or {}).get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/parameters/"):
                break
            name = reference.removeprefix("#/parameters/").replace("~1", "/").replace("~0", "~")
            target = as_object((as_object(self._document.get("parameters")) or {}).get(name))
            if target is None:
                break
            node = target
        return node

    def _response(self, node: Any, media_types: Any) -> Any:
        response = as_object(node)
        if response is None or "$ref" in response:
            return node
        result: JsonObject = {"description": response.get("description", "")}
        if "schema" in response:
            names = [name for name in as_list(media_types) if isinstance(name, str)] or [_JSON]
            schema = _convert_schema(response["schema"])
            result["content"] = {name: {"schema": schema} for name in names}
        return result


def _location(node: Any) -> Any:
    return (as_object(node) or {}).get("in")


def _parameter(node: Any) -> Any:
    parameter = as_object(node)
    if parameter is None or "$ref" in parameter or "schema" in parameter:
        return node
    result = {key: value for key, value in parameter.items() if key in _PARAMETER_KEYS and key != "collectionFormat"}
    result["schema"] = _field_schema(parameter)
    if parameter.get("type") == "array":
        style, explode = _STYLES.get(str(parameter.get("collectionFormat") or "csv"), ("unknown", False))
        is_list = style == "form" and not explode and parameter.get("in") in ("path", "header")
        result |= {"style": "simple" if is_list else style, "explode": explode}
    return result


def _field_schema(parameter: JsonObject) -> Any:
    schema = {key: value for key, value in parameter.items() if key not in _PARAMETER_KEYS}
    return _convert_schema(schema)


def _body(node: Any, media_types: list[str]) -> JsonObject:
    parameter = as_object(node) or {}
    schema = _convert_schema(parameter.get("schema") or {})
    return {
        "description": parameter.get("description", ""),
        "required": parameter.get("required") is True,
        "content": {name: {"schema": schema} for name in media_types},
    }


def _form(nodes: list[Any], media_types: list[str]) -> JsonObject:
    fields = [as_object(node) or {} for node in nodes]
    has_files = any(field.get("type") == "file" for field in fields)
    is_multipart = has_files or (_MULTIPART in media_types and _FORM not in media_types)
    properties: JsonObject = {}
    encoding: JsonObject = {}
    for field in fields:
        name = str(field.get("name"))
        properties[name] = _field_schema(field)
        if "description" in field:
            properties[name] = {"description": field["description"], **properties[name]}
        if field.get("type") == "array" and not is_multipart:
            style, explode = _STYLES.get(str(field.get("collectionFormat") or "csv"), ("unknown", False))
            encoding[name] = {"style": style, "explode": explode}
    required = [str(field.get("name")) for field in fields if field.get("required") is True]
    schema: JsonObject = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    media_type: JsonObject = {"schema": schema, **({"encoding": encoding} if encoding else {})}
    return {"required": bool(required), "content": {_MULTIPART if is_multipart else _FORM: media_type}}


def _convert_schema(schema: Any) -> Any:
    """Returns a schema, or definitions, in the words of OpenAPI 3.0."""
    if isinstance(schema, list):
        return [_convert_schema(item) for item in as_list(schema)]
    node = as_object(schema)
    if node is None:
        return schema
    result = {key: _convert_schema(value) for key, value in node.items()}
    if result.get("type") == "file":
        result |= {"type": "string", "format": "binary"}
    if result.get("x-nullable") is True:
        result["nullable"] = True
    if isinstance(result.get("discriminator"), str):
        result["discriminator"] = {"propertyName": result["discriminator"]}
    return result


def _security_scheme(node: Any) -> Any:
    scheme = as_object(node)
    if scheme is None:
        return node
    if scheme.get("type") == "basic":
        return {"type": "http", "scheme": "basic"}
    if scheme.get("type") != "oauth2":
        return scheme
    flow = {key: scheme[key] for key in ("authorizationUrl", "tokenUrl", "scopes") if key in scheme}
    return {"type": "oauth2", "flows": {_FLOWS.get(str(scheme.get("flow")), "unknown"): flow}}
