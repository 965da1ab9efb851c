"""What an audit leaves behind: measurements, verdicts and the record that holds them. No torch is needed to read one."""

from bilip.record.audit_record import SCHEMA, USES, AuditRecord, Measurement, Picture, Status, Verdict
from bilip.record.checksum import UNSEALED, is_whole, seal
from bilip.record.files import environment, open_regular, read_file, write_aside
from bilip.record.header import Entry, Header, read_header
from bilip.record.histogram import Histogram
from bilip.record.plain import from_plain, parse_json, read_json, to_plain, write_json

__all__ = [
    "SCHEMA",
    "UNSEALED",
    "USES",
    "AuditRecord",
    "Entry",
    "Header",
    "Histogram",
    "Measurement",
    "Picture",
    "Status",
    "Verdict",
    "environment",
    "from_plain",
    "is_whole",
    "open_regular",
    "parse_json",
    "read_file",
    "read_header",
    "read_json",
    "seal",
    "to_plain",
    "write_aside",
    "write_json",
]
