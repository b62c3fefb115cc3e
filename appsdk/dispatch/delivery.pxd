# The types of appsdk/dispatch/delivery.py where it is compiled.

from appsdk.calls.context cimport Context
