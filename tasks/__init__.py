"""Tasks: one file per step of the chain, thin over `packhouse.run.steps`."""

import logging

from packhouse.system.terminal import EscapedRecord

logging.setLogRecordFactory(EscapedRecord)  # what tasks log repeats rows, files and manifests
