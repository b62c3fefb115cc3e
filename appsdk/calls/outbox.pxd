# The types of appsdk/calls/outbox.py where it is compiled.

from immortal.appsdk.calls.context cimport Context

cdef class Batch:
    cdef public object destination
    cdef public list parts
    cdef public Py_ssize_t size_bytes
