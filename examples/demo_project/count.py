"""Count for ever, and let others read how far: what the demo pauses in the middle."""

import os
import time
from itertools import count

for number in count(1):
    with open("/tmp/count.new", "w") as file:
        file.write(str(number))
    os.replace("/tmp/count.new", "/tmp/count")
    time.sleep(0.05)
