"""The bundled demonstration model: how it was made, and where it lies."""

from pathlib import Path

MODEL_FOLDER = Path(__file__).parent / "model"
