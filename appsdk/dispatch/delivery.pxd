# The types of appsdk/dispatch/delivery.py where it is compiled.

from immortal.appsdk.calls.context cimport Context
