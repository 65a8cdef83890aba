"""Run the steps of `packhouse.run.steps` as Prefect tasks, with states, artifacts and events."""

import logging
from typing import Any

from typing_extensions import override

from packhouse.system.escaping import for_terminal


class EscapedRecord(logging.LogRecord):
    """A log record with control characters escaped in message and traceback.

    All lines but the first are indented, so that no message can imitate another record.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0]:
            said = logging.Formatter().formatException(self.exc_info)
            self.exc_text = for_terminal(said, keep_lines=True)

    @override
    def getMessage(self) -> str:
        return for_terminal(super().getMessage(), keep_lines=True).replace("\n", "\n    ")


logging.setLogRecordFactory(EscapedRecord)  # log messages of tasks quote rows, files and manifests
