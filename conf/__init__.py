"""The configs, as ``pkg://gradpolicy.conf``: in a clone `gradpolicy/conf` leads here."""
