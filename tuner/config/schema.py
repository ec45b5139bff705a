"""The recipe's JSON schema, for editors and other programs."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from tuner.config.duration import Duration
from tuner.config.recipe import Recipe


class _Schema(GenerateJsonSchema):
    """Writes defaults as people write them."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, Duration):
            return str(dft)
        if isinstance(dft, tuple) and dft and isinstance(dft[0], Duration):
            return str(dft[0]) if len(dft) == 1 else [str(item) for item in dft]
        if hasattr(dft, "model_dump"):
            return dft.model_dump(mode="json")
        return super().encode_default(dft)


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe."""
    schema = Recipe.model_json_schema(schema_generator=_Schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
