"""TLS 1.3 for connections between ranks, with the one certificate of the job on both sides.

``pipesgd keys new --tls`` puts a certificate and its key into the file of the secret. Each side must show this very
certificate: names, authorities and dates mean nothing, since both sides have the same file.
"""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Mapping

from pipesgd.comm.greeting import Wrap
from pipesgd.errors import UserInputError
from pipesgd.membership.secret import HOW_TO_MAKE_TLS, VARIABLE, Secret

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name: clocks of machines differ."""


def tls(secret: Secret | None) -> Wrap:
    """Return the function that puts TLS on a connection, which sends or expects nothing yet.

    Raises:
        UserInputError: there is no secret, or no certificate in its file.
    """
    if secret is None:
        raise UserInputError(
            f"secret-file must be given with transport tls, or {VARIABLE} be set; got none "
            f"({HOW_TO_MAKE_TLS!r} makes one)"
        )
    contexts = {accepted: _context(secret, accepted=accepted) for accepted in (True, False)}
    return functools.partial(_wrapped, contexts)


def _wrapped(contexts: Mapping[bool, ssl.SSLContext], sock: socket.socket, accepted: bool) -> socket.socket:
    return contexts[accepted].wrap_socket(sock, server_side=accepted, do_handshake_on_connect=False)


def _context(secret: Secret, *, accepted: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepted else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    try:
        context.load_cert_chain(secret.path)
        context.load_verify_locations(secret.path)
    except (ssl.SSLError, OSError):
        raise UserInputError(
            f"secret-file must hold a certificate with transport tls; got none in {secret.path} "
            f"({HOW_TO_MAKE_TLS!r} makes a file with one)"
        ) from None
    if accepted:
        context.num_tickets = 0  # nothing is resumed
    return context
