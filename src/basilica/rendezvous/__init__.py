"""The rendezvous of all runs on one machine: the etcd v2 keys API, served by a process of our own."""
