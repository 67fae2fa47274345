"""Files → a repository of the Hugging Face hub, in one commit."""

from collections.abc import Mapping
from pathlib import Path

from espalier.data.records import BadInput


def upload(repository: str, kind: str, files: Mapping[str, Path | bytes], is_private: bool) -> str:
    """Make the repository where it is missing and add the files in one commit, whose id is returned; `kind`: model
    or dataset. Raises BadInput with the hub's own reason where it refuses, cannot be reached, or there is no token."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    try:
        api.create_repo(repository, repo_type=kind, private=is_private, exist_ok=True)
        done = api.create_commit(repository, operations, repo_type=kind, commit_message="Published by Espalier")
    except Exception as error:  # of any kind: the hub's, and those of the library that carries its calls
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"
        raise BadInput(f"{repository}: the hub does not take it: {reason} (the token is HF_TOKEN, or that of `hf auth "
                       "login`; HF_HUB_OFFLINE must not be set)") from None  # fmt: skip
    return str(done.oid)
