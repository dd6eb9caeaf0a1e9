"""`toolspace chat`: a conversation with an agent of a gateway, in a terminal or through a pipe."""

from toolspace.cli.chat.conversation import command as command
