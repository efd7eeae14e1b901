//! A cluster through `kubectl` and `helm`. Every call has a deadline.

use super::flows::{End, Labels};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

/// Longest call that does not wait for pods.
const CALL_MAX: Duration = Duration::from_secs(60);
/// Longest wait for pods to be in the wanted state: a worker loads a model, a drain takes time.
pub(crate) const SETTLE_MAX: Duration = Duration::from_secs(180);
/// Interval of the checks of a wait.
const LOOK: Duration = Duration::from_millis(250);
/// Label with a pod's part in a release.
const COMPONENT: &str = "app.kubernetes.io/component";

/// One namespace of a cluster, with one release.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) chart: PathBuf,
    pub(crate) namespace: String,
    pub(crate) release: String,
}

/// The relevant fields of a pod.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) name: String,
    /// Changes with each start.
    pub(crate) uid: String,
    pub(crate) ready: bool,
    /// The pod itself.
    pub(crate) object: Value,
}

/// Runs a program to its end. Returns its stdout, or an error with all its output.
pub(crate) async fn run<A: AsRef<OsStr>>(program: &str, arguments: &[A], longest: Duration) -> anyhow::Result<String> {
    let shown = || arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect::<Vec<_>>().join(" ");
    let output = Command::new(program).args(arguments).kill_on_drop(true).output();
    let output = timeout(longest, output).await.with_context(|| format!("{program} {} took too long", shown()))?;
    let output = output.with_context(|| format!("{program} does not start"))?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{program} {}: {}\n{out}{err}", shown(), output.status);
    Ok(out.into_owned())
}

impl Cluster {
    /// `kubectl` in the namespace.
    pub(crate) async fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        run("kubectl", &[&["--namespace", &self.namespace][..], arguments].concat(), CALL_MAX).await
    }

    /// The result of `kubectl get`.
    pub(crate) async fn get(&self, arguments: &[&str]) -> anyhow::Result<Vec<Value>> {
        let text = self.kubectl(&[&["get", "--output=json"], arguments].concat()).await?;
        match serde_json::from_str(&text)? {
            Value::Object(mut found) if found["kind"] == "List" => match found["items"].take() {
                Value::Array(items) => Ok(items),
                other => bail!("kubectl get {arguments:?} finds {other}"),
            },
            one => Ok(vec![one]),
        }
    }

    /// Runs `helm` for the release, with a deadline that lets it wait for pods.
    pub(crate) async fn helm(&self, verb: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let fixed = ["--namespace", &self.namespace, verb, &self.release];
        run("helm", &[&fixed[..], arguments].concat(), SETTLE_MAX + CALL_MAX).await
    }

    /// Installs or upgrades the release with these values files and settings, and waits until all of it is ready.
    pub(crate) async fn apply(&self, verb: &str, values: &[PathBuf], set: &[String]) -> anyhow::Result<()> {
        let mut arguments = vec![self.chart.display().to_string(), "--wait".into()];
        arguments.push(format!("--timeout={}s", SETTLE_MAX.as_secs()));
        arguments.extend(values.iter().map(|file| format!("--values={}", file.display())));
        arguments.extend(set.iter().map(|set| format!("--set={set}")));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.helm(verb, &arguments).await.map(drop)
    }

    /// What Helm would install with these values files and settings, without contacting the cluster.
    pub(crate) async fn template(&self, values: &[PathBuf], set: &[String]) -> anyhow::Result<String> {
        // A Helm that was built without a version of Kubernetes assumes a very old one.
        let fixed = ["--skip-tests", "--no-hooks", "--kube-version=1.35.0"].map(String::from);
        let mut arguments = [vec![self.chart.display().to_string()], fixed.to_vec()].concat();
        arguments.extend(values.iter().map(|file| format!("--values={}", file.display())));
        arguments.extend(set.iter().map(|set| format!("--set={set}")));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.helm("template", &arguments).await
    }

    /// Pods of a part of the release; all pods if it is empty.
    pub(crate) async fn pods(&self, component: &str) -> anyhow::Result<Vec<Pod>> {
        let own = format!("app.kubernetes.io/instance={}", self.release);
        let selector = if component.is_empty() { own } else { format!("{own},{COMPONENT}={component}") };
        let found = self.get(&["pods", "--selector", &selector]).await?;
        let found = found.into_iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        found.map(pod).collect()
    }

    /// Waits until this part has the expected number of ready pods, none of them among `but`.
    pub(crate) async fn ready(&self, component: &str, count: usize, but: &[String]) -> anyhow::Result<Duration> {
        let started = Instant::now();
        loop {
            // The API server itself may be slow under load: an error counts as not ready.
            let pods = self.pods(component).await.unwrap_or_default();
            if pods.iter().filter(|pod| pod.ready && !but.contains(&pod.uid)).count() >= count {
                return Ok(started.elapsed());
            }
            ensure!(
                started.elapsed() < SETTLE_MAX,
                "{count} pods of {component} are not ready after {SETTLE_MAX:?}: {}\n{}",
                pods.iter().map(|pod| format!("{} {}", pod.name, pod.object["status"])).collect::<Vec<_>>().join("\n"),
                self.last_words(component).await
            );
            sleep(LOOK).await;
        }
    }

    /// Ends of the logs of a part.
    pub(crate) async fn last_words(&self, component: &str) -> String {
        let selector = format!("{COMPONENT}={component}");
        let logs = self.kubectl(&["logs", "--selector", &selector, "--tail=20", "--prefix", "--all-containers"]).await;
        logs.unwrap_or_else(|error| format!("{error:#}"))
    }

    /// Removes a pod at once: its containers get the shortest grace period, and this does not wait for their end.
    pub(crate) async fn kill(&self, pod: &Pod) -> anyhow::Result<()> {
        self.kubectl(&["delete", "pod", &pod.name, "--grace-period=0", "--force", "--wait=false"]).await.map(drop)
    }

    /// Where clients reach the service of a part: address and port by the port's name.
    pub(crate) async fn service(&self, component: &str, port: &str) -> anyhow::Result<String> {
        let selector = format!("app.kubernetes.io/instance={},{COMPONENT}={component}", self.release);
        for service in self.get(&["services", "--selector", &selector]).await? {
            let address = service["spec"]["clusterIP"].as_str().filter(|ip| *ip != "None");
            let ports = service["spec"]["ports"].as_array().into_iter().flatten();
            let number = ports.clone().find(|p| p["name"] == port).and_then(|p| p["port"].as_u64());
            if let (Some(address), Some(number)) = (address, number) {
                return Ok(format!("http://{address}:{number}"));
            }
        }
        bail!("no service of {component} has a port named {port}")
    }

    /// A pod as one end of a connection.
    pub(crate) async fn end(&self, pod: &Pod) -> anyhow::Result<End> {
        let namespace = &self.get(&["namespace", &self.namespace]).await?[0];
        let containers = pod.object["spec"]["containers"].as_array().into_iter().flatten();
        let ports = containers.flat_map(|container| container["ports"].as_array().into_iter().flatten());
        let named = ports.filter_map(|port| {
            Some((port["name"].as_str()?.to_owned(), u16::try_from(port["containerPort"].as_u64()?).ok()?))
        });
        Ok(End {
            namespace: self.namespace.clone(),
            namespace_labels: labels(namespace),
            labels: labels(&pod.object),
            ports: named.collect(),
        })
    }

    /// Names of all objects in the namespace, as `kind/name`, except those that Kubernetes itself creates and those that only record
    /// events.
    pub(crate) async fn objects(&self) -> anyhow::Result<Vec<String>> {
        let kinds = self.kubectl(&["api-resources", "--namespaced", "--verbs=list", "--output=name"]).await?;
        let told = ["events", "events.events.k8s.io"];
        let kinds: Vec<&str> = kinds.split_whitespace().filter(|kind| !told.contains(kind)).collect();
        let found = self.kubectl(&["get", &kinds.join(","), "--output=name", "--ignore-not-found"]).await?;
        let own = ["serviceaccount/default", "configmap/kube-root-ca.crt"];
        Ok(found.lines().filter(|name| !own.contains(name)).map(str::to_owned).collect())
    }
}

fn labels(object: &Value) -> Labels {
    let labels = object["metadata"]["labels"].as_object().into_iter().flatten();
    labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

fn pod(object: Value) -> anyhow::Result<Pod> {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    Ok(Pod {
        name: object["metadata"]["name"].as_str().context("a pod without a name")?.to_owned(),
        uid: object["metadata"]["uid"].as_str().context("a pod without an identity")?.to_owned(),
        ready: conditions.clone().any(|c| c["type"] == "Ready" && c["status"] == "True"),
        object,
    })
}
