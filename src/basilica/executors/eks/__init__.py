"""Replicas as one Indexed Job of Kubernetes."""

from basilica.executors.eks.executor import EKSExecutor as EKSExecutor
