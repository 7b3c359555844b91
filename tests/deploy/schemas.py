"""JSON schemas of the objects in deploy/, of the fields that we use and no others.

Written from the published field references: KubeRay's of ray.io/v1, Kubernetes' of Pod, Service,
Deployment and ConfigMap, Ray Serve's of its config file. A field that is not here is an error, so
that a misspelt one is found.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
BOOL: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}


def record(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def array(item: Schema, least: int = 0) -> Schema:
    """A list."""
    return {"type": "array", "items": item, "minItems": least}


def mapping(value: Schema) -> Schema:
    """An object with any names."""
    return {"type": "object", "additionalProperties": value}


META = record(("name",), name=NAME, namespace=NAME, labels=mapping(TEXT), annotations=mapping(TEXT))
SECRET_KEY = record(("name", "key"), name=NAME, key=TEXT, optional=BOOL)
ENV = {
    **record(
        ("name",),
        name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
        value={"type": "string"},
        valueFrom=record((), secretKeyRef=SECRET_KEY),
    ),
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
}
RESOURCES = record((), requests=mapping(QUANTITY), limits=mapping(QUANTITY))
PROBE = record(
    (),
    tcpSocket=record(("port",), port=PORT),
    httpGet=record(("port",), path=TEXT, port=PORT, scheme={"enum": ["HTTP", "HTTPS"]}),
    periodSeconds=COUNT,
    initialDelaySeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
CONTAINER = record(
    ("name", "image", "resources"),
    name=NAME,
    image=TEXT,
    command=array(TEXT),
    args=array(TEXT),
    env=array(ENV),
    ports=array(
        record(
            ("containerPort",),
            name={"type": "string", "pattern": "^[a-z0-9-]{1,15}$"},
            containerPort=PORT,
        )
    ),
    resources=RESOURCES,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    securityContext=record((), allowPrivilegeEscalation=BOOL, readOnlyRootFilesystem=BOOL),
    volumeMounts=array(
        record(
            ("name", "mountPath"),
            name=NAME,
            mountPath={"type": "string", "pattern": "^/"},
            subPath=TEXT,
            readOnly=BOOL,
        )
    ),
)
VOLUME = {
    **record(
        ("name",),
        name=NAME,
        configMap=record(("name",), name=NAME),
        secret=record(("secretName",), secretName=NAME, defaultMode=COUNT),
        persistentVolumeClaim=record(("claimName",), claimName=NAME, readOnly=BOOL),
        emptyDir=record((), medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
    ),
    "minProperties": 2,
    "maxProperties": 2,
}
POD = record(
    ("containers",),
    containers=array(CONTAINER, 1),
    initContainers=array(CONTAINER),
    volumes=array(VOLUME),
    nodeSelector=mapping(TEXT),
    serviceAccountName=NAME,
    automountServiceAccountToken=BOOL,
    terminationGracePeriodSeconds=COUNT,
    securityContext=record((), runAsNonRoot=BOOL, runAsUser=COUNT, runAsGroup=COUNT, fsGroup=COUNT),
)
TEMPLATE = record(
    ("spec",), metadata=record((), labels=mapping(TEXT), annotations=mapping(TEXT)), spec=POD
)
HEAD = record(
    ("rayStartParams", "template"),
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    enableIngress=BOOL,
    rayStartParams=mapping({"type": "string"}),
    template=TEMPLATE,
)
WORKERS = record(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    idleTimeoutSeconds=COUNT,
    suspend=BOOL,
    rayStartParams=mapping({"type": "string"}),
    template=TEMPLATE,
)
CREDENTIAL = record((), value=TEXT, valueFrom=record(("secretKeyRef",), secretKeyRef=SECRET_KEY))
CLUSTER = record(
    ("headGroupSpec",),
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    headGroupSpec=HEAD,
    workerGroupSpecs=array(WORKERS),
    enableInTreeAutoscaling=BOOL,
    gcsFaultToleranceOptions=record(
        (),
        redisAddress=TEXT,
        redisUsername=CREDENTIAL,
        redisPassword=CREDENTIAL,
        externalStorageNamespace=TEXT,
    ),
    suspend=BOOL,
)
RAY_SERVICE = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=META,
    spec=record(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=TEXT,
        rayClusterConfig=CLUSTER,
        upgradeStrategy=record((), type={"enum": ["NewCluster", "None"]}),
        excludeHeadPodFromServeSvc=BOOL,
    ),
)
CONFIG_MAP = record(
    ("apiVersion", "kind", "metadata", "data"),
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=META,
    data=mapping({"type": "string"}),
)
SERVICE = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=META,
    spec=record(
        ("selector", "ports"),
        type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        selector=mapping(TEXT),
        ports=array(record(("port",), name=NAME, port=PORT, targetPort=PORT), 1),
    ),
)
DEPLOYMENT = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "apps/v1"},
    kind={"const": "Deployment"},
    metadata=META,
    spec=record(
        ("selector", "template"),
        replicas=COUNT,
        strategy=record((), type={"enum": ["Recreate", "RollingUpdate"]}),
        selector=record(("matchLabels",), matchLabels=mapping(TEXT)),
        template=TEMPLATE,
    ),
)
KINDS = {
    "RayService": RAY_SERVICE,
    "ConfigMap": CONFIG_MAP,
    "Service": SERVICE,
    "Deployment": DEPLOYMENT,
}
SERVE = record(
    ("applications",),
    proxy_location={"enum": ["Disabled", "HeadOnly", "EveryNode"]},
    http_options=record((), host=TEXT, port=PORT, request_timeout_s={"type": "number"}),
    applications=array(
        record(
            ("name", "import_path"),
            name=TEXT,
            route_prefix={"type": "string", "pattern": "^/"},
            import_path={"type": "string", "pattern": r"^[\w.]+:\w+$"},
            args=mapping({}),
            runtime_env=mapping({}),
        ),
        1,
    ),
)
