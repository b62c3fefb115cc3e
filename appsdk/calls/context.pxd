# The types of appsdk/calls/context.py where it is compiled: what each message reads and writes is plain memory.

cdef class Context:
    cdef public Py_ssize_t message_index
    cdef public Py_ssize_t slice_end
    cdef public bint carries_handles
    cdef public unsigned long handling_thread_id
    cdef public unsigned long thread_id
    cdef public object _streams, _streams_of, committer_id, definition, handlers, instance_name, multicasts, nodes, outbox, peers, present
    cdef public object record_time_ns, reporter, run_contexts
    cdef public object seed, sequence_id, sites, source, tasks
