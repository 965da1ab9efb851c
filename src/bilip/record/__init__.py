"""What an audit leaves behind: measurements, verdicts and the record that holds them. No torch is needed to read one."""

from bilip.record.audit_record import SCHEMA, USES, AuditRecord, Status, Verdict
from bilip.record.files import environment, write_aside
from bilip.record.measurement import UNITS, Histogram, Measurement, Picture, Quantity, quantity_named
from bilip.record.plain import from_plain, read_json, to_plain, write_json

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
