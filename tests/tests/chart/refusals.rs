//! Values that the chart refuses, each with a message that names the key.

use crate::helm::render_values;
use anyhow::ensure;

fn check(values: &str, parts: &[&str]) -> anyhow::Result<()> {
    match render_values(values)? {
        Ok(_) => anyhow::bail!("this was not refused:\n{values}"),
        Err(said) => ensure!(parts.iter().all(|part| said.contains(part)), "{values}\nsays not {parts:?}:\n{said}"),
    }
    Ok(())
}

const MODEL: &str = "models: [{name: m, source: x, decode: [{name: d}]}]";

#[test]
fn values_without_a_mistake_are_not_refused() -> anyhow::Result<()> {
    let rendered = render_values(MODEL)?;
    ensure!(rendered.is_ok(), "{rendered:?}");
    Ok(())
}

#[test]
fn typos_are_refused_wherever_they_are() -> anyhow::Result<()> {
    check("router: {replcas: 2}", &["/router", "replcas"])?;
    check("routers: {replicas: 2}", &["routers"])?;
    check("models: [{name: m, source: x, decode: [{name: d, gpus: 1}]}]", &["/models/0/decode/0", "gpus"])?;
    check("decode: {engine: {gpuMemoryUtilization: 90}}", &["/decode/engine/gpuMemoryUtilization", "0.99"])?;
    check("decode: {engine: {device: 'cuda:1'}}", &["/decode/engine/device"])?;
    check(
        "models: [{name: m, source: x, engine: {kv_cache: 1GiB}, decode: [{name: d}]}]",
        &["/models/0/engine", "kv_cache"],
    )?;
    check("prefill: {rdma: {resources: rdma/x}}", &["/prefill/rdma", "resources"])?;
    check("observability: {podmonitor: {enabled: true}}", &["/observability", "podmonitor"])
}

#[test]
fn values_of_the_wrong_kind_are_refused() -> anyhow::Result<()> {
    check("router: {replicas: two}", &["/router/replicas", "integer"])?;
    check("router: {replicas: 0}", &["/router/replicas", "minimum"])?;
    check("etcd: {replicas: 2}", &["/etcd/replicas", "1, 3"])?;
    check("prefill: {rdma: {memlock: maybe}}", &["/prefill/rdma/memlock", "nonroot"])?;
    check(
        "prefill: {engine: {prefixCache: {pinnedPercentMax: 91}}}",
        &["/prefill/engine/prefixCache/pinnedPercentMax"],
    )?;
    check("router: {cache: {ttlSeconds: soon}}", &["/router/cache/ttlSeconds"])?;
    check("router: {prices: {models: {m: {input: 1}}}}", &["/router/prices/models/m"])?;
    check("decode: {engine: {kvCacheBytes: lots}}", &["/decode/engine/kvCacheBytes"])?;
    check("decode: {engine: {blockTokens: 20}}", &["/decode/engine/blockTokens", "multiple"])?;
    check("decode: {engine: {device: cuda, blockTokens: 48}}", &["/decode/engine/blockTokens", "128"])?;
    check("decode: {engine: {device: cuda}, gpu: {count: 8}}", &["/decode/gpu/count", "maximum"])?;
    check("prefill: {autoscaling: {kind: vpa}}", &["/prefill/autoscaling/kind", "keda"])?;
    check("telemetry: {traceSampleRatio: 2}", &["/telemetry/traceSampleRatio", "maximum"])?;
    check("auth: {keys: [{sha256: my-key, tenant: a}]}", &["/auth/keys/0/sha256"])?;
    let key = |tenant: &str| format!("{{sha256: {}, tenant: {tenant}}}", "a".repeat(64));
    check(&format!("auth: {{keys: [{}]}}", key(&"t".repeat(64))), &["/auth/keys/0/tenant"])?;
    check(&format!("{MODEL}\nauth: {{keys: [{}, {}]}}", key("a"), key("b")), &["auth.keys", "\"a\" and \"b\""])?;
    let etcd = |more: &str| format!("{MODEL}\netcd: {{external: {{endpoints: [\"https://a:2379\", {more}");
    check(&etcd("\"http://b:2379\"]}, enabled: false}"), &["etcd.external.endpoints", "all of them"])?;
    check(&etcd("\"https://b:2379\"]}, enabled: false}"), &["etcd.external.tlsSecret"])?;
    check(&etcd("\"https://b:2379\"], tlsSecret: tls}}"), &["etcd.enabled must be false"])?;
    let ca = "telemetry: {otlpUrl: \"http://jaeger:4317\", otlpCa: {secret: ca}}";
    check(&format!("{MODEL}\n{ca}"), &["telemetry.otlpCa.secret", "https://"])?;
    check("decode: {image: {version: 1.2.3}}", &["/decode/image", "version"])?;
    check("router: {env: [{name: A, value: 1}]}", &["/router/env/0/value", "string"])?;
    check("models: []", &["/models", "minItems"])?;
    check("models: [{name: Llama_3, source: x, decode: [{name: d}]}]", &["/models/0/name"])?;
    check("models: [{name: m, source: x}]", &["/models/0", "decode"])?;
    let two = "models: [{name: m, source: x, weights: {claim: {name: a}, image: {reference: b}}, decode: [{name: d}]}]";
    check(two, &["/models/0/weights", "maxProperties"])
}

#[test]
fn routes_that_a_listener_would_refuse_are_refused() -> anyhow::Result<()> {
    let gateway = |more: &str| format!("router: {{gateway: {{enabled: true, {more}}}}}");
    let hosts = |http: &str, grpc: &str| {
        gateway(&format!("parentRefs: [{{name: edge}}], httpHostnames: [{http}], grpcHostnames: [{grpc}]"))
    };
    let no_names = &["router.gateway", "httpHostnames", "grpcHostnames", "grpcParentRefs"];
    check(&gateway("parentRefs: [{name: edge}]"), no_names)?;
    check(&hosts("llm.example.com", ""), no_names)?;
    let overlap = &["router.gateway", "overlap", "grpcHostnames"];
    check(&hosts("a.example.com, llm.example.com", "llm.example.com"), overlap)?;
    check(&hosts("'*.example.com'", "llm.example.com"), overlap)?;
    check(&hosts("a.grpc.example.com", "'*.example.com'"), overlap)?;
    let apart = |http: &str, grpc: &str| gateway(&format!("parentRefs: [{{{http}}}], grpcParentRefs: [{{{grpc}}}]"));
    check(&apart("name: edge, sectionName: https", "name: edge, namespace: llm"), no_names)?;
    for sound in [
        hosts("llm.example.com", "grpc.llm.example.com"),
        apart("name: edge", "name: inner"),
        apart("name: edge", "name: edge, namespace: elsewhere"),
        apart("name: edge, sectionName: https", "name: edge, sectionName: grpc"),
        apart("name: edge, port: 443", "name: edge, port: 8443"),
    ] {
        let rendered = render_values(&sound)?;
        ensure!(rendered.is_ok(), "{sound}: {rendered:?}");
    }
    Ok(())
}

#[test]
fn values_that_contradict_each_other_are_refused() -> anyhow::Result<()> {
    check("etcd: {enabled: false}", &["etcd.external.endpoints"])?;
    check("etcd: {replicas: 3, persistence: {enabled: false}}", &["etcd.persistence.enabled"])?;
    check("etcd: {quotaBytes: 1073741824}", &["etcd.quotaBytes", "a volume of 1Gi"])?;
    check("identity: {secrets: {router: mine}}", &["identity.secrets.router", "identity.from must be secrets"])?;
    check("identity: {from: cert-manager}", &["identity.certManager.issuer.name"])?;
    check("identity: {from: vault}", &["/identity/from", "cert-manager"])?;
    check("enabled: false", &["enabled is false", "condition: baton.enabled"])?;
    let digest = format!("router: {{image: {{tag: a, digest: 'sha256:{}'}}}}", "0".repeat(64));
    check(&digest, &["image of router", "digest"])?;
    check("router: {image: {digest: abc}}", &["/router/image/digest"])?;
    check("decode: {extraVolumeMounts: [{name: a, mountPath: b}]}", &["/decode/extraVolumeMounts/0/mountPath"])?;
    let user = "etcd: {enabled: false, external: {endpoints: ['https://e:2379'], tlsSecret: tls, user: baton}}";
    check(user, &["etcd.external.password.secret"])?;
    let digest = "0".repeat(64);
    check(
        &format!("auth: {{existingSecret: s, keys: [{{sha256: '{digest}', tenant: a}}]}}"),
        &["auth.existingSecret"],
    )?;
    check("router: {gateway: {enabled: true}}", &["router.gateway.parentRefs"])?;
    check("decode: {autoscaling: {kind: hpa, min: 5, max: 2}}", &["autoscaling.min"])?;
    check("router: {env: [{name: POD_IP, value: a}]}", &["env of router", "POD_IP", "by the chart"])?;
    let twice = "prefill: {env: [{name: A, value: a}, {name: A, value: b}]}";
    check(twice, &["env of prefill pool", "A is set above"])?;
    let beside = "models: [{name: m, source: /models/x, weights: {image: {reference: b}}, decode: [{name: d}]}]";
    check(beside, &["/models/x", "/weights"])?;
    check("decode: {autoscaling: {kind: keda, min: 0, max: 2}}", &["autoscaling.min", "at least 1"])?;
    check("models: [{name: m, source: x, decode: [{name: d}, {name: d}]}]", &["two decode pools named"])?;
    check(
        "models: [{name: m, source: x, decode: [{name: d}]}, {name: m, source: z, decode: [{name: d}]}]",
        &["two are named"],
    )?;
    check(
        "models: [{name: m, source: x, decode: [{name: d}]}, {name: o, source: z, servedNames: [m], decode: [{name: d}]}]",
        &["\"m\" and \"o\" would both be served as \"m\"", "servedNames"],
    )?;
    let one_name = "models:
- {name: a-b, source: x, decode: [{name: c}]}
- {name: a, source: z, decode: [{name: b-c}]}
";
    check(one_name, &["decode pool", "of model \"a-b\"", "of model \"a\"", "baton-decode-a-b-c"])
}

#[test]
fn adapters_that_no_worker_could_read_are_refused() -> anyhow::Result<()> {
    let model = |more: &str| format!("models: [{{name: m, source: x, adapters: {{folder: loras}}, {more}}}]");
    check(&model("decode: [{name: d}]"), &["loras", "weights.claim"])?;
    let on_gpu = "weights: {claim: {name: c}}, decode: [{name: d, engine: {device: cuda}, gpu: {count: 1}}]";
    check(&model(on_gpu), &["adapters of", "computed on CPUs"])?;
    check(&model("adapter: {}, decode: [{name: d}]"), &["/models/0", "adapter"])
}
