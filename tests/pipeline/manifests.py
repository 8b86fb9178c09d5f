#!/usr/bin/env python3
"""Reads Kubernetes manifests with a YAML parser of its own, for render_test.cc.

Usage: manifests.py show FILE      checks the objects against what the cluster demands of them and
                                   prints them as one JSON list
       manifests.py known FILE     the same for one manifest, whose fields all have to be in the JSON
                                   on standard input: what kubectl makes of it with its own types
Exit code 77: python3-yaml is not installed. 1: a problem for each line on standard output.
"""

import json
import re
import sys

try:
    import yaml
except ImportError:
    sys.exit(77)

LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")  # RFC 1035, at most 63
QUANTITY = re.compile(r"^[0-9]+(m|Mi|Gi)?$")


class Checker:
    def __init__(self):
        self.problems = []

    def need(self, condition, what):
        if not condition:
            self.problems.append(what)

    def object(self, item):
        name = item["metadata"]["name"]
        self.need(LABEL.match(name) and len(name) <= 63, f"{name}: no name of an object")
        kinds = {"ConfigMap": "v1", "Service": "v1", "StatefulSet": "apps/v1"}
        self.need(kinds.get(item["kind"]) == item["apiVersion"], f"{name}: {item['kind']}")
        for key, value in item["metadata"]["labels"].items():
            self.need(isinstance(value, str) and len(value) <= 63, f"{name}: label {key}")
        getattr(self, item["kind"].lower())(name, item)

    def configmap(self, name, item):
        for key, value in item["data"].items():
            self.need(re.match(r"^[-._a-zA-Z0-9]+$", key), f"{name}: key {key}")
            self.need(isinstance(value, str), f"{name}: {key} is no text")

    def service(self, name, item):
        self.need(isinstance(item["spec"]["selector"], dict), f"{name}: no selector")
        for port in item["spec"]["ports"]:
            self.need(0 < port["port"] < 65536 and len(port["name"]) <= 15, f"{name}: port {port}")

    def statefulset(self, name, item):
        spec = item["spec"]
        pod = spec["template"]
        labels = pod["metadata"]["labels"]
        self.need(len(name) <= 52, f"{name}: its pods' labels would be too long")
        self.need(spec["selector"]["matchLabels"].items() <= labels.items(), f"{name}: selector")
        self.need(isinstance(spec["replicas"], int) and spec["replicas"] > 0, f"{name}: replicas")
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        self.need(len(set(volumes)) == len(volumes), f"{name}: volumes {volumes}")
        names = [container["name"] for container in pod["spec"]["containers"]]
        self.need(names and len(set(names)) == len(names), f"{name}: containers {names}")
        for container in pod["spec"]["containers"]:
            self.container(f"{name}/{container['name']}", container, volumes)

    def container(self, where, container, volumes):
        self.need(LABEL.match(where.split("/")[1]), f"{where}: no name")
        self.need(container["image"], f"{where}: no image")
        self.need(all(isinstance(word, str) for word in container["command"]), f"{where}: command")
        for variable in container["env"]:
            self.need(isinstance(variable.get("value", ""), str), f"{where}: {variable}")
        for port in container["ports"]:
            self.need(isinstance(port["containerPort"], int) and len(port["name"]) <= 15,
                      f"{where}: {port}")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            words = container[probe]["exec"]["command"]
            self.need(len(words) >= 3 and all(isinstance(w, str) for w in words),
                      f"{where}: {probe}")
        for amounts in container["resources"].values():
            for amount in amounts.values():
                self.need(isinstance(amount, str) and QUANTITY.match(amount), f"{where}: {amount}")
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        self.need(len(set(paths)) == len(paths), f"{where}: mounts {paths}")
        for mount in container["volumeMounts"]:
            self.need(mount["name"] in volumes and mount["mountPath"].startswith("/"),
                      f"{where}: {mount}")


def lost(ours, theirs, place):
    """Fields of ours that the other side does not have."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            if not isinstance(theirs, dict) or key not in theirs:
                yield f"{place}.{key}"
            else:
                yield from lost(value, theirs[key], f"{place}.{key}")
    elif isinstance(ours, list):
        if not isinstance(theirs, list) or len(theirs) < len(ours):
            yield place
        else:
            for i, value in enumerate(ours):
                yield from lost(value, theirs[i], f"{place}[{i}]")


def main():
    objects = [item for item in yaml.safe_load_all(open(sys.argv[2], encoding="utf-8")) if item]
    checker = Checker()
    for item in objects:
        checker.object(item)
    problems = checker.problems
    if sys.argv[1] == "known":
        theirs = json.load(sys.stdin)
        theirs.get("spec", {}).pop("selector", None)  # what kubectl was asked to change
        objects[0].get("spec", {}).pop("selector", None)
        problems += lost(objects[0], theirs, objects[0]["kind"])
    if problems:
        print("\n".join(problems))
        sys.exit(1)
    if sys.argv[1] == "show":
        print(json.dumps(objects))


main()
