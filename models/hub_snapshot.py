"""A model by its hub name → the folder of one commit on this machine, so that all that is read of it is of that commit.

A name without a commit is what its owner makes of it: two starts of one command may read two models.
"""

from pathlib import Path

from espalier.models.load import BadModel, check_model_folder

_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.pt")


def local_model(path: str, revision: str = "") -> str:
    """Return the folder of a model: of a hub name that of its commit in the cache, fetched where it is missing;
    `revision`: a branch, a tag or a commit, "" for the newest. Raises BadModel where there is none, and on a revision
    of a folder."""
    if Path(path).exists() or path.count("/") != 1:
        check_model_folder(path)
        if revision:
            raise BadModel(f"{path} is a folder, which has no revision: leave stage.revision out")
        return path
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(path, revision=revision or None, allow_patterns=list(_FILES)))
        for kind in ("*.safetensors", "*.bin"):
            if not next(folder.glob("*.safetensors"), None):  # weights of the one kind or of the other
                folder = Path(snapshot_download(path, revision=folder.name, allow_patterns=[kind]))
    except (OSError, ValueError) as error:  # its own kinds are among these
        reason = str(error).strip().split("\n")[0][:200]
        raise BadModel(f"{path}: neither a folder nor a model of the hub that can be had: {reason}") from None
    check_model_folder(str(folder))
    return str(folder)


def commit_of(folder: str) -> str:
    """Return the commit of a folder of `local_model`, "" of one that is no snapshot of the hub."""
    path = Path(folder)
    return path.name if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--") else ""
