"""Reads manifests from standard input, checks each against the schemas of the Kubernetes releases named, if any, prints them as JSON.

Kinds that are not Kubernetes' own have no schema there and are only read; they are named, so that a misspelled kind is no such.
"""

import json
import sys

import yaml

EXTENSIONS = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "GRPCRoute", "Certificate"}


class Unique(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: the API server would take either."""

    def construct_mapping(self, node, deep=False):
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value if key.tag != merge]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise ValueError(f"{node.start_mark}: {sorted(twice)} stand twice")
        return super().construct_mapping(node, deep)


def main():
    manifests = [m for m in yaml.load_all(sys.stdin, Unique) if m]
    problems = list(check(manifests, sys.argv[1:]))
    print("\n".join(problems), file=sys.stderr)
    print(json.dumps(manifests))
    return 1 if problems else 0


def check(manifests, releases):
    if not releases:
        return
    # Slow to load, and not needed where manifests are only read.
    import kubernetes_validate

    for manifest in manifests:
        if manifest["kind"] in EXTENSIONS:
            continue
        for release in releases:
            try:
                kubernetes_validate.validate(manifest, release, strict=True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                where = f"{manifest['kind']} {manifest['metadata']['name']} in Kubernetes {release}"
                yield f"{where}: {getattr(error, 'message', error)} at {list(getattr(error, 'path', []))}"


sys.exit(main())
