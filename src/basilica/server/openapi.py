"""The OpenAPI document: the part that FastAPI derives from the routes, and the bodies, errors and keys that it cannot
derive."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from basilica.wire import requests as inc
from basilica.wire.base import Incoming
from basilica.wire.responses import Problem

_REF = "#/components/schemas/{model}"
_BODIES: dict[tuple[str, str], type[Incoming]] = {
    ("/deployments", "post"): inc.CreateDeployment,
    ("/deployments/{name}/scale-distributed", "post"): inc.ScaleBody,
    ("/deployments/{name}/enroll-metadata", "post"): inc.EnrollBody,
    ("/deployments/{name}/exec", "post"): inc.ExecBody,
}
_OPEN = ("/health", "/metrics", "/public/deployments/{name}/metadata")
_ERRORS = {"400": "bad request", "401": "no or wrong key", "403": "not allowed", "404": "not found", "409": "conflict"}


def describe(app: FastAPI) -> None:
    """Replace the application's document with the complete one, which is built on first use."""
    derive = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(derive())
        return app.openapi_schema

    app.openapi = complete  # type: ignore[method-assign]


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    models = [(model, "validation") for model in _BODIES.values()] + [(Problem, "serialization")]
    _, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    schemas.update(definitions["$defs"])
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    problem = {"application/json": {"schema": {"$ref": _REF.format(model="Problem")}}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = _BODIES.get((path, method))
            if body is not None:
                schema = {"$ref": _REF.format(model=body.__name__)}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            operation["responses"].pop("422", None)
            for status, text in _ERRORS.items():
                operation["responses"].setdefault(status, {"description": text, "content": problem})
            operation["responses"]["default"] = {"description": "any other error", "content": problem}
            if path not in _OPEN:
                operation["security"] = [{"key": []}]
    return document
