{{- /* Peers by their part of this release: dict "root" "component". */ -}}
{{- define "baton.network.peer" -}}
- podSelector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
{{- end -}}

{{- /* Who may read metrics, as a rule: dict "root" "port". */ -}}
{{- define "baton.network.scrapes" -}}
- ports: [{protocol: TCP, port: {{ .port }}}]
  {{- with .root.Values.networkPolicy.scrapers }}
  from: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* Whom pods of a part may call, as rules: dict "root". DNS answers everybody. */ -}}
{{- define "baton.network.egress" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- if .root.Values.etcd.enabled }}
- ports: [{protocol: TCP, port: 2379}]
  to: {{- include "baton.network.peer" (dict "root" .root "component" "etcd") | nindent 4 }}
{{- end }}
{{- with .root.Values.networkPolicy.egress.also }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.network.types" -}}
[Ingress{{ if .Values.networkPolicy.egress.enabled }}, Egress{{ end }}]
{{- end -}}

{{- /* Routers call workers; workers reach each other at every port, since the data plane takes free ones. */ -}}
{{- define "baton.worker.networkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "baton.name" (dict "root" .root "part" .role) }}
  labels: {{- include "baton.labels" (dict "root" .root "component" .role) | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "baton.selector" (dict "root" .root "component" .role) | nindent 6 }}
  policyTypes: {{ include "baton.network.types" .root }}
  ingress:
    - ports: [{protocol: TCP, port: 50052}]
      from: {{- include "baton.network.peer" (dict "root" .root "component" "router") | nindent 8 }}
    - from:
        {{- include "baton.network.peer" (dict "root" .root "component" "prefill") | nindent 8 }}
        {{- include "baton.network.peer" (dict "root" .root "component" "decode") | nindent 8 }}
    {{- include "baton.network.scrapes" (dict "root" .root "port" 9090) | nindent 4 }}
  {{- if .root.Values.networkPolicy.egress.enabled }}
  egress:
    - to:
        {{- include "baton.network.peer" (dict "root" .root "component" "prefill") | nindent 8 }}
        {{- include "baton.network.peer" (dict "root" .root "component" "decode") | nindent 8 }}
    {{- include "baton.network.egress" . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* Whether two lists of parents of routes may mean one listener: dict "namespace" "http" "grpc". */ -}}
{{- define "baton.gateway.shared" -}}
{{- $namespace := .namespace -}}
{{- $shared := false -}}
{{- range $http := .http -}}
{{- range $grpc := $.grpc -}}
{{- $same := and (eq $http.name $grpc.name) (eq (default $namespace $http.namespace) (default $namespace $grpc.namespace)) -}}
{{- /* Without a section or a port, all listeners of the gateway are meant. */ -}}
{{- $section := or (not $http.sectionName) (not $grpc.sectionName) (eq $http.sectionName $grpc.sectionName) -}}
{{- $port := or (not $http.port) (not $grpc.port) (eq (int $http.port) (int $grpc.port)) -}}
{{- if and $same $section $port -}}{{- $shared = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if $shared -}}true{{- end -}}
{{- end -}}
