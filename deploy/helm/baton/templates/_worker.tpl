{{- /* One pool of workers: dict "root" and a pool of "baton.pools". */ -}}
{{- define "baton.worker.deployment" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $parts := dict "root" $root "component" .role "model" .model.name "pool" $pool.name -}}
{{- $image := dict "root" $root "part" (printf "%s-worker" .role) "own" $pool.image -}}
{{- $env := include "baton.env" (dict "env" $pool.env "where" (printf "%s pool %q of model %q" .role $pool.name .model.name)) -}}
{{- $asRoot := and $pool.rdma.resource (eq $pool.rdma.memlock "root") -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels: {{- include "baton.labels" $parts | nindent 4 }}
spec:
  {{- if eq $pool.autoscaling.kind "none" }}
  replicas: {{ int $pool.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  {{- /* A pod may have to drain before its successor loads, and a download takes as long as it takes. */}}
  progressDeadlineSeconds: {{ include "baton.worker.deadline" . }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: {{ int $pool.surge }}
      maxUnavailable: {{ ternary 1 0 (eq (int $pool.surge) 0) }}
  selector:
    matchLabels: {{- include "baton.selector" $parts | nindent 6 }}
  template:
    metadata:
      labels:
        {{- /* No versions: they would roll all pods for a chart of another number. */}}
        {{- include "baton.selector" $parts | nindent 8 }}
        {{- with $pool.labels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        checksum/config: {{ include "baton.config.worker" . | sha256sum }}
        {{- with $pool.annotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      {{- include "baton.podCommon" (dict "root" $root "serviceAccount" (include "baton.name" (dict "root" $root "part" .role))) | nindent 6 }}
      terminationGracePeriodSeconds: {{ add $pool.drain.preStopSeconds $pool.drain.seconds 10 }}
      securityContext: {{- include "baton.podSecurity" (dict "asRoot" $asRoot) | nindent 8 }}
      {{- with include "baton.scheduling" (dict "of" $pool "selector" (include "baton.selector" $parts)) | trim }}{{ . | nindent 6 }}{{ end }}
      {{- $doctor := and $pool.doctor (or $pool.rdma.resource (gt (int $pool.gpu.count) 0)) }}
      {{- if or $doctor .model.weights.download }}
      initContainers:
      {{- end }}
      {{- if $doctor }}
        - name: doctor
          image: {{ include "baton.image" $image }}
          imagePullPolicy: {{ include "baton.pullPolicy" $image }}
          command:
            - baton
            - doctor
            {{- if $pool.rdma.resource }}
            - --rdma
            {{- with $pool.rdma.lanes }}
            - {{ printf "--ucx-tls=%s" . | quote }}
            {{- end }}
            {{- with $pool.rdma.devices }}
            - {{ printf "--ucx-net-devices=%s" . | quote }}
            {{- end }}
            {{- /* What a GPU holds is not locked in the host's memory. */}}
            {{- if ne $pool.engine.device "cuda" }}
            - {{ printf "--pool-bytes=%s" $pool.engine.kvCacheBytes | quote }}
            {{- end }}
            {{- end }}
            {{- if gt (int $pool.gpu.count) 0 }}
            - --gpu
            {{- end }}
            {{- if not $root.Values.etcd.enabled }}
            - {{ printf "--etcd=%s" (include "baton.etcd.endpoints" $root | fromJsonArray | join ",") | quote }}
            {{- end }}
          {{- with include "baton.worker.doctorEnv" (dict "root" $root "env" $env) | trim }}
          env: {{- . | nindent 12 }}
          {{- end }}
          resources: {{- include "baton.worker.resources" $pool | nindent 12 }}
          securityContext: {{- include "baton.containerSecurity" (dict "asRoot" $asRoot) | nindent 12 }}
          {{- with include "baton.secretMounts" $root | trim }}
          volumeMounts: {{- . | nindent 12 }}
          {{- end }}
      {{- end }}
      {{- if .model.weights.download }}
        - name: download
          image: {{ include "baton.image" $image }}
          imagePullPolicy: {{ include "baton.pullPolicy" $image }}
          args: [--fetch-only]
          env:
            - {name: BATON_CONFIG, value: /etc/baton/config/baton.toml}
            # Only to be complete: nothing listens or registers here.
            - {name: BATON_GRPC__LISTEN, value: "127.0.0.1:0"}
            {{- with $env }}{{ . | nindent 12 }}{{ end }}
            {{- with .model.weights.download.tokenSecret }}
            - name: HF_TOKEN
              valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
            {{- end }}
          resources: {{- toYaml $pool.resources | nindent 12 }}
          securityContext: {{- include "baton.containerSecurity" dict | nindent 12 }}
          volumeMounts:
            - {name: config, mountPath: /etc/baton/config, readOnly: true}
            - {name: cache, mountPath: /cache}
            - {name: tmp, mountPath: /tmp}
            {{- /* The configuration names their files. */}}
            {{- with include "baton.secretMounts" $root | trim }}{{ . | nindent 12 }}{{ end }}
      {{- end }}
      containers:
        - name: worker
          image: {{ include "baton.image" $image }}
          imagePullPolicy: {{ include "baton.pullPolicy" $image }}
          env: {{- include "baton.podVariables" (dict "root" $root "port" 50052 "worker" true "env" $pool.env) | nindent 12 }}
            {{- with $env }}{{ . | nindent 12 }}{{ end }}
          ports:
            - {name: grpc, containerPort: 50052}
            - {name: metrics, containerPort: 9090}
          startupProbe:
            httpGet: {path: /startupz, port: metrics}
            periodSeconds: 5
            failureThreshold: {{ max 1 (div (add $pool.probes.startupSeconds 4) 5) }}
          readinessProbe:
            httpGet: {path: /readyz, port: metrics}
            periodSeconds: 2
            timeoutSeconds: 2
            failureThreshold: 1
          livenessProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: {{ max 1 (div (add $pool.probes.livenessSeconds 9) 10) }}
          {{- with include "baton.preStop" $pool.drain.preStopSeconds | trim }}{{ . | nindent 10 }}{{ end }}
          resources: {{- include "baton.worker.resources" $pool | nindent 12 }}
          securityContext: {{- include "baton.containerSecurity" (dict "asRoot" $asRoot) | nindent 12 }}
          volumeMounts:
            - {name: config, mountPath: /etc/baton/config, readOnly: true}
            - {name: cache, mountPath: /cache}
            - {name: tmp, mountPath: /tmp}
            {{- with .model.weights.claim }}
            - {name: weights, mountPath: /weights, readOnly: true{{ with .subPath }}, subPath: {{ . | quote }}{{ end }}}
            {{- end }}
            {{- if .model.weights.image }}
            - {name: weights, mountPath: /weights, readOnly: true}
            {{- end }}
            {{- if $pool.shm }}
            - {name: shm, mountPath: /dev/shm}
            {{- end }}
            {{- if $pool.hugepages.size }}
            - {name: hugepages, mountPath: /dev/hugepages}
            {{- end }}
            {{- with include "baton.secretMounts" $root | trim }}{{ . | nindent 12 }}{{ end }}
            {{- with $pool.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{ end }}
      volumes:
        - name: config
          configMap: {name: {{ .name }}}
        - name: cache
          emptyDir: {sizeLimit: {{ with .model.weights.download }}{{ .size }}{{ else }}{{ $pool.scratch }}{{ end }}}
        - name: tmp
          emptyDir: {sizeLimit: {{ $pool.scratch }}}
        {{- with .model.weights.claim }}
        - name: weights
          persistentVolumeClaim: {claimName: {{ .name }}, readOnly: true}
        {{- end }}
        {{- with .model.weights.image }}
        - name: weights
          image: {reference: {{ .reference }}, pullPolicy: {{ default "IfNotPresent" .pullPolicy }}}
        {{- end }}
        {{- with $pool.shm }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ . }}}
        {{- end }}
        {{- with $pool.hugepages.size }}
        - name: hugepages
          emptyDir: {medium: HugePages-{{ . }}}
        {{- end }}
        {{- with include "baton.secretVolumes" (dict "root" $root "component" .role) | trim }}{{ . | nindent 8 }}{{ end }}
        {{- with $pool.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
{{- end -}}

{{- /* How long a roll-out may go without a pod that gets ready: seconds. */ -}}
{{- define "baton.worker.deadline" -}}
{{- add 130 .pool.probes.startupSeconds .pool.drain.preStopSeconds .pool.drain.seconds (ternary 7200 0 (not (empty .model.weights.download))) -}}
{{- end -}}

{{- /* Variables of `baton doctor`: those of values, and how an etcd that is not the chart's is reached. The chart's own starts at the same time,
and is not asked for. dict "root" "env". */ -}}
{{- define "baton.worker.doctorEnv" -}}
{{- $etcd := .root.Values.etcd.external }}
{{- if not .root.Values.etcd.enabled }}
- {name: BATON_MEMBERSHIP__ETCD__PREFIX, value: {{ include "baton.etcd.prefix" .root }}}
{{- end }}
{{- if include "baton.etcd.tls" .root }}
- {name: BATON_MEMBERSHIP__ETCD__CA, value: /etc/baton/etcd/ca.crt}
{{- if $etcd.clientCertificate }}
- {name: BATON_MEMBERSHIP__ETCD__CERT, value: /etc/baton/etcd/tls.crt}
- {name: BATON_MEMBERSHIP__ETCD__KEY, value: /etc/baton/etcd/tls.key}
{{- end }}
{{- end }}
{{- if include "baton.etcd.password" .root }}
- {name: BATON_MEMBERSHIP__ETCD__USER, value: {{ $etcd.user | quote }}}
- {name: BATON_MEMBERSHIP__ETCD__PASSWORD_FILE, value: {{ printf "/etc/baton/etcd-password/%s" $etcd.password.key | quote }}}
{{- end }}
{{- with .env }}
{{ . }}
{{- end }}
{{- end -}}

{{- /* Devices and huge pages are limits; what is asked for follows from them. */ -}}
{{- define "baton.worker.resources" -}}
{{- $limits := deepCopy (default dict .resources.limits) -}}
{{- $requests := deepCopy (default dict .resources.requests) -}}
{{- if gt (int .gpu.count) 0 -}}{{- $_ := set $limits .gpu.resource (int .gpu.count) -}}{{- end -}}
{{- if .rdma.resource -}}{{- $_ := set $limits .rdma.resource (int .rdma.count) -}}{{- end -}}
{{- if .hugepages.size -}}
{{- $_ := set $limits (printf "hugepages-%s" .hugepages.size) .hugepages.amount -}}
{{- $_ := set $requests (printf "hugepages-%s" .hugepages.size) .hugepages.amount -}}
{{- end -}}
{{- toYaml (dict "limits" $limits "requests" $requests) -}}
{{- end -}}

{{- define "baton.worker.config" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .name }}
  labels: {{- include "baton.labels" (dict "root" .root "component" .role "model" .model.name "pool" .pool.name) | nindent 4 }}
data:
  baton.toml: | {{- include "baton.config.worker" . | trim | nindent 4 }}
{{- end -}}

{{- define "baton.worker.disruptionBudget" -}}
{{- $parts := dict "root" .root "component" .role "model" .model.name "pool" .pool.name -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "baton.labels" $parts | nindent 4 }}
spec:
  maxUnavailable: {{ .pool.disruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "baton.selector" $parts | nindent 6 }}
{{- end -}}

{{- /* How a pool gets smaller: a pod a minute, once nothing within the look back asked for more. */ -}}
{{- define "baton.worker.scaleDown" -}}
scaleDown:
  stabilizationWindowSeconds: {{ int .cooldownSeconds }}
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end -}}

{{- /* Scales one pool: prefill by the prompt tokens that wait, decode by the share of its KV in use. */ -}}
{{- define "baton.worker.autoscaler" -}}
{{- $parts := dict "root" .root "component" .role "model" .model.name "pool" .pool.name -}}
{{- $scaling := .pool.autoscaling -}}
{{- if lt (int $scaling.min) 1 -}}
{{- fail (printf "%s pool %q of model %q: autoscaling.min must be at least 1, since what is scaled on is told by the pool's own pods: without one, none would ever come back" .role .pool.name .model.name) -}}
{{- end -}}
{{- if gt (int $scaling.min) (int $scaling.max) -}}
{{- fail (printf "%s pool %q of model %q: autoscaling.min is above autoscaling.max" .role .pool.name .model.name) -}}
{{- end -}}
{{- $metric := ternary "baton_waiting_tokens" "baton_kv_used_ratio" (eq .role "prefill") -}}
{{- if eq $scaling.kind "hpa" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels: {{- include "baton.labels" $parts | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  minReplicas: {{ int $scaling.min }}
  maxReplicas: {{ int $scaling.max }}
  behavior: {{- include "baton.worker.scaleDown" $scaling | nindent 4 }}
  metrics:
    - type: Pods
      pods:
        metric: {name: {{ $metric }}}
        target: {type: AverageValue, averageValue: {{ if eq .role "prefill" }}{{ $scaling.target | quote }}{{ else }}{{ printf "%dm" (int64 (mulf $scaling.target 1000)) }}{{ end }}}
{{- else if eq $scaling.kind "keda" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels: {{- include "baton.labels" $parts | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ .name }}}
  minReplicaCount: {{ int $scaling.min }}
  maxReplicaCount: {{ int $scaling.max }}
  {{- /* KEDA's own cooldownPeriod holds only on the way to no pods at all, where these pools never go. */}}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- include "baton.worker.scaleDown" $scaling | nindent 8 }}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .root.Values.observability.prometheusUrl }}
        query: sum({{ $metric }}{namespace="{{ .root.Release.Namespace }}",pod=~"{{ .name }}-[a-z0-9]+-[a-z0-9]+"})
        threshold: {{ $scaling.target | quote }}
        {{- /* No answer is no reason to shrink. */}}
        ignoreNullValues: "false"
{{- end -}}
{{- end -}}
