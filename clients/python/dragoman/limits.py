"""Limits of the protocol: what client, gateway, controller and agent must agree on."""

from __future__ import annotations

MAX_RESUMES = 3  # of one stream
MAX_ID_BYTES = 128  # of the id of a request, and of the name of a tenant or a model
MAX_NUM_CHOICES = 128
MAX_NUM_INPUTS = 2048  # of one embedding request
MAX_EMBED_TOKENS = (1 << 21) - 1  # over all of them: as many as a ticket of usual size can say
# Tokenizing takes some 200 bytes of memory and a microsecond for each byte; the longest reply fits a message.
MAX_TOKENIZE_BYTES = 2 << 20
MAX_DETOKENIZE_TOKENS = MAX_TOKENIZE_BYTES  # as many as tokenizing can give
# A DNS label: the id is a name in the agent's certificate. With every other claim of a ticket at its longest at least
# 8 bytes are left for the tenant.
MAX_AGENT_ID_BYTES = 63

TICKET_VERSION = 1
TICKET_KEY_BYTES = 32
TICKET_JTI_BYTES = 16
TICKET_MODEL_DIGEST_BYTES = 16
