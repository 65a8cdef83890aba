"""packhouse: raw instruction data in, versions of training-ready, packed token data out.

    import packhouse
    version = packhouse.prepare("data.json", tokenizer="Qwen/Qwen2.5-0.5B-Instruct", seq_len=4096)
    trainer = SFTTrainer(..., train_dataset=version.train, eval_dataset=version.eval)

Nothing is imported until it is asked for. What a trainer needs beside `load_packed` is in
`packhouse.loaders`; errors are in `packhouse.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` imports
    from packhouse.addons.audit_any.audit import audit
    from packhouse.addons.audit_any.report import AuditReport
    from packhouse.addons.exports.writing import Export, export_version
    from packhouse.addons.packs_in_memory.packs import PackTally, pack_dataset
    from packhouse.addons.packs_in_memory.supervised import make_supervised_dataset
    from packhouse.addons.plan.estimate import plan
    from packhouse.api import Version, open_version, prepare
    from packhouse.errors import PackhouseError
    from packhouse.loaders.preferences import load_preferences
    from packhouse.loaders.versions import load_packed
    from packhouse.recipe import Recipe, load_recipe

    __version__: str

_MODULES = {
    "PackhouseError": "packhouse.errors",
    "Recipe": "packhouse.recipe",
    "Version": "packhouse.api",
    "load_packed": "packhouse.loaders",
    "load_preferences": "packhouse.loaders",
    "load_recipe": "packhouse.recipe",
    "open_version": "packhouse.api",
    "prepare": "packhouse.api",
}

__all__ = [
    "AuditReport",
    "Export",
    "PackTally",
    "PackhouseError",
    "Recipe",
    "Version",
    "__version__",
    "audit",
    "export_version",
    "load_packed",
    "load_preferences",
    "load_recipe",
    "make_supervised_dataset",
    "open_version",
    "pack_dataset",
    "plan",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    from packhouse.registry import PUBLIC

    module = _MODULES.get(name) or PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'packhouse' has no attribute '{name}'")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        needs = f"packhouse.{name} needs torch: pip install 'packhouse[torch]'"
        raise ImportError(needs) from error


def _version() -> str:
    from importlib import metadata  # as long as all of `import packhouse`, which needs none

    try:
        return metadata.version("packhouse")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__
