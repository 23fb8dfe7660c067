"""The language model that is shipped for tests and the quickstart. `MODEL_CARD.md` says what it is."""

from pathlib import Path

from oscar.errors import OscarError


def embedded_model() -> Path:
    """Folder of the embedded model, in Hugging Face layout.

    Raises:
        OscarError: this build carries none.
    """
    folder = Path(__file__).parent
    if not (folder / "config.json").is_file():
        raise OscarError("this build carries no embedded model; install a released build or give a model of your own")
    return folder
