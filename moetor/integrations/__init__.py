"""Bridges to other libraries; each imports what it bridges to, and nothing below imports one."""
