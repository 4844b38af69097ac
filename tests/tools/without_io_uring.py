"""Runs a command with the io_uring system calls refused, as a container's default profile refuses them.

Usage: without_io_uring.py COMMAND [ARGUMENT...]
"""
import ctypes
import os
import struct
import sys

LOAD_WORD, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x35, 0x06
FIRST_CALL, LAST_CALL = 425, 427  # io_uring_setup, io_uring_enter, io_uring_register
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # the error number is EPERM
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


def instruction(code, value, if_true=0, if_false=0):
    return struct.pack("HBBI", code, if_true, if_false, value)


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


filter_code = b"".join([
    instruction(LOAD_WORD, 0),
    instruction(JUMP_IF_AT_LEAST, LAST_CALL + 1, 1, 0),
    instruction(JUMP_IF_AT_LEAST, FIRST_CALL, 1, 0),
    instruction(RETURN, ALLOW),
    instruction(RETURN, REFUSE),
])
held = ctypes.create_string_buffer(filter_code, len(filter_code))
program = Program(len(filter_code) // 8, ctypes.addressof(held))
library = ctypes.CDLL(None, use_errno=True)
if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or library.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program)):
    sys.exit("cannot install the filter: " + os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[1], sys.argv[1:])
