"""Speed against peers on the same machine, in the same minute; `make bench` runs them."""
