"""Run the steps of `packhouse.run.steps` as Prefect tasks, with states, artifacts and events."""

import logging

from packhouse.system.terminal import EscapedRecord

logging.setLogRecordFactory(EscapedRecord)  # log messages of tasks quote rows, files and manifests
