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

# A client that has heard nothing for the first of these times sends a ping, and takes the connection for broken if
# there is no answer within the second. The sum is less than the daemon's heartbeat time-out, so that the session is
# still there.
PING_SECONDS = 5
ANSWER_SECONDS = 8

# A rank that has answered another one nothing for the first of these times is silent. Each sends a datagram to some
# others in every beat; see trainer_client/training/ranks/pulse.py.
RANK_SECONDS: float = 20
BEAT_SECONDS = 0.5
