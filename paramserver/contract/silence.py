"""How long each part of a run may be silent, and what follows: the times that both ends must know, and the table.

[Note: silence]

| who is silent         | for how long | who says it, when         | others end        | goes on         |
|-----------------------|--------------|---------------------------|-------------------|-----------------|
| daemon                | < 13 s       | not said                  | never             | all             |
| daemon                | 13 to 300 s  | its ranks, after 8 to 13 s | never            | session         |
| daemon                | > 300 s      | its ranks, after 300 s    | with its ranks    | resumes         |
| trainer alone         | < 15 s       | not said                  | never             | all             |
| trainer alone         | >= 15 s      | the daemon, after 15 s    | never             | returns         |
| trainer beside others | < 15 s       | not said                  | never             | all             |
| trainer beside others | >= 15 s      | the daemon, after 15 s    | after 15 to 20 s  | resumes         |
| link to the daemon    | < 15 s       | its ranks, after 8 to 13 s | never            | session         |
| link to the daemon    | >= 15 s      | the daemon, after 15 s    | as for a trainer  | as for a trainer |
| node, link of nodes   | < 20 s       | not said                  | never             | all             |
| node, link of nodes   | >= 20 s      | its peers, after 20 to 22 s | after 20 to 23 s | resumes        |

docs/silence.md has the table with the meaning of its words, and tests/unit/paramserver/contract/test_silence.py
compares the two with the settings.
"""

from __future__ import annotations

# A client that has received no bytes from the daemon for PING_SECONDS sends a ping. If no answer comes within
# ANSWER_SECONDS, it takes the connection for broken. The sum of the two is less than the daemon's heartbeat time-out,
# so that the client can still resume its session.
PING_SECONDS = 5
ANSWER_SECONDS = 8

# A rank takes another rank for silent if it has had no answer from it for RANK_SECONDS. Once in every BEAT_SECONDS,
# each rank sends a datagram to some other ranks; see trainer_client/training/ranks/pulse.py.
RANK_SECONDS: float = 20
BEAT_SECONDS = 0.5
