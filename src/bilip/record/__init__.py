"""What an audit leaves behind: measurements, verdicts and the record that holds them. No torch is needed to read one."""

from bilip.record.audit_record import SCHEMA, USES, AuditRecord, Measurement, Picture, Status, Verdict
from bilip.record.files import environment, write_aside
from bilip.record.histogram import Histogram
from bilip.record.plain import from_plain, read_json, to_plain, write_json
from bilip.record.quantity import UNITS, Quantity, quantity_named

__all__ = [
    "SCHEMA",
    "UNITS",
    "USES",
    "AuditRecord",
    "Histogram",
    "Measurement",
    "Picture",
    "Quantity",
    "Status",
    "Verdict",
    "environment",
    "from_plain",
    "quantity_named",
    "read_json",
    "to_plain",
    "write_aside",
    "write_json",
]
