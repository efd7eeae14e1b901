{{- /* Security of a pod, as `restricted` wants it: dict "root" true where memory can only be locked as root. */ -}}
{{- define "baton.podSecurity" -}}
{{- if .asRoot -}}
runAsUser: 0
runAsGroup: 0
{{- else -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
{{- end }}
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .asRoot }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{- /* What every pod has: dict "root" "serviceAccount". Variables of services begin like those of the configuration: none are made. */ -}}
{{- define "baton.podCommon" -}}
serviceAccountName: {{ .serviceAccount }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Where a pod goes: dict "of" (values) "selector". */ -}}
{{- define "baton.scheduling" -}}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .of.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- if .of.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- $selector := .selector }}
{{- with .of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" ($selector | fromYaml)))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Variables of values, each once and none that the chart sets: dict "env" "where". */ -}}
{{- define "baton.env" -}}
{{- $where := .where -}}
{{- $taken := dict -}}
{{- range list "POD_NAME" "POD_IP" "POD_UID" "POD_NAMESPACE" "NODE_NAME" "BATON_CONFIG" "BATON_GRPC__ADVERTISE" "BATON_CLUSTER__ADVERTISE" "BATON_CACHE__SECRET" "BATON_INSTANCE__ID" "BATON_TRANSFER__BIND" -}}
{{- $_ := set $taken . "by the chart" -}}
{{- end -}}
{{- range $variable := .env -}}
{{- with get $taken $variable.name -}}{{- fail (printf "env of %s: %s is set %s already" $where $variable.name .) -}}{{- end -}}
{{- $_ := set $taken $variable.name "above" -}}
{{- end -}}
{{- with .env -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{- /* The variables of one pod: dict "root" "port" "worker" "env". Traces name the pod, unless env says something else of it. */ -}}
{{- define "baton.podVariables" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- $named := false }}
{{- range .env }}{{ if eq .name "OTEL_RESOURCE_ATTRIBUTES" }}{{ $named = true }}{{ end }}{{ end }}
{{- if not $named }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.pod.name=$(POD_NAME),k8s.pod.uid=$(POD_UID),k8s.namespace.name=$(POD_NAMESPACE),k8s.node.name=$(NODE_NAME)
{{- end }}
- name: BATON_CONFIG
  value: /etc/baton/config/baton.toml
- name: BATON_GRPC__ADVERTISE
  value: {{ printf (ternary "[$(POD_IP)]:%d" "$(POD_IP):%d" (eq .root.Values.ipFamily "ipv6")) (int .port) | quote }}
{{- if and (not .worker) .root.Values.identity.enabled }}
- name: BATON_CLUSTER__ADVERTISE
  value: {{ ternary "[$(POD_IP)]:50052" "$(POD_IP):50052" (eq .root.Values.ipFamily "ipv6") | quote }}
{{- end }}
{{- if .worker }}
- name: BATON_INSTANCE__ID
  value: $(POD_NAME)
- name: BATON_TRANSFER__BIND
  value: $(POD_IP)
{{- end }}
{{- end -}}

{{- /* Volumes of secrets that every process reads, and where they are mounted: dict "root" "component". */ -}}
{{- define "baton.secretVolumes" -}}
{{- include "baton.identity.volume" . -}}
{{- with .root }}
{{- if include "baton.etcd.tls" . }}
- name: etcd-tls
  secret: {secretName: {{ .Values.etcd.external.tlsSecret }}, defaultMode: 0440}
{{- end }}
{{- with .Values.telemetry.otlpCa.secret }}
- name: otlp-ca
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if include "baton.etcd.password" . }}
- name: etcd-password
  secret: {secretName: {{ required "etcd.external.password.secret must name the secret with the password of etcd.external.user" .Values.etcd.external.password.secret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.secretMounts" -}}
{{- include "baton.identity.mount" . }}
{{- if include "baton.etcd.tls" . }}
- {name: etcd-tls, mountPath: /etc/baton/etcd, readOnly: true}
{{- end }}
{{- if .Values.telemetry.otlpCa.secret }}
- {name: otlp-ca, mountPath: /etc/baton/otlp, readOnly: true}
{{- end }}
{{- if include "baton.etcd.password" . }}
- {name: etcd-password, mountPath: /etc/baton/etcd-password, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Hook before SIGTERM, which starts the drain itself: seconds. */ -}}
{{- define "baton.preStop" -}}
{{- if gt (int .) 0 }}
lifecycle:
  preStop:
    sleep: {seconds: {{ int . }}}
{{- end }}
{{- end -}}

{{- /* dict "root" "component" "name" "of" (values). */ -}}
{{- define "baton.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  labels: {{- include "baton.labels" . | nindent 4 }}
  {{- with .of.serviceAccount.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end -}}
