"""The bundled demonstration models: how they were made, and where they lie."""

from pathlib import Path

MODELS = {
    "demo": Path(__file__).parent / "model",  # Gated DeltaNet
    "demo-kda": Path(__file__).parent / "model_kda",  # Kimi Delta Attention
}
MODEL_FOLDER = MODELS["demo"]
