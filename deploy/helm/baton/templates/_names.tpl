{{- /* Name of the release's objects. */ -}}
{{- define "baton.fullname" -}}
{{- if not .Values.enabled -}}
{{- fail "enabled is false: that is for a parent chart, whose Chart.yaml has `condition: baton.enabled` at this dependency" -}}
{{- end -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Name of an object of a part: dict "root" "part". Long ones are cut and told apart by a digest, so that pods' names fit 63 bytes. */ -}}
{{- define "baton.name" -}}
{{- $name := printf "%s-%s" (include "baton.fullname" .root) .part -}}
{{- if gt (len $name) 46 -}}
{{- printf "%s-%s" ($name | trunc 37 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{- /* Labels of an object: dict "root" "component", and "model" and "pool" of workers. */ -}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* What selects the pods of a part. It never changes with values that an upgrade may change. */ -}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
baton/model: {{ . }}
{{- end }}
{{- with .pool }}
baton/pool: {{ . }}
{{- end }}
{{- end -}}

{{- /* Image of a part: dict "root" "part" "own" (what the part sets itself). Routers have one build: the suffix of all is that of workers. */ -}}
{{- define "baton.image" -}}
{{- $image := .root.Values.image -}}
{{- $own := default dict .own -}}
{{- $repository := default (printf "%s/baton-%s" $image.registry .part) $own.repository -}}
{{- $tag := coalesce $own.tag $image.tag .root.Chart.AppVersion -}}
{{- $suffix := ternary "" $image.suffix (eq .part "router") -}}
{{- if hasKey $own "suffix" -}}{{- $suffix = $own.suffix -}}{{- end -}}
{{- if $own.digest -}}
{{- if or $own.tag $own.suffix -}}{{- fail (printf "image of %s: digest says which image it is: leave tag and suffix out" .part) -}}{{- end -}}
{{- printf "%s@%s" $repository $own.digest -}}
{{- else -}}
{{- printf "%s:%s%s" $repository $tag $suffix -}}
{{- end -}}
{{- end -}}

{{- define "baton.pullPolicy" -}}
{{- default .root.Values.image.pullPolicy (default dict .own).pullPolicy -}}
{{- end -}}

{{- /* Addresses of etcd, as a list in JSON. */ -}}
{{- define "baton.etcd.endpoints" -}}
{{- if .Values.etcd.enabled -}}
{{- if .Values.etcd.external.endpoints -}}
{{- fail "etcd.external.endpoints name an etcd: etcd.enabled must be false, or the chart's own would be used" -}}
{{- end -}}
{{- $endpoints := list -}}
{{- $name := include "baton.name" (dict "root" . "part" "etcd") -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $endpoints = append $endpoints (printf "%s://%s-%d.%s.%s.svc.%s:2379" (ternary "https" "http" $.Values.identity.enabled) $name $i $name $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- $endpoints | toJson -}}
{{- else -}}
{{- if not .Values.etcd.external.endpoints -}}
{{- fail "etcd.enabled is false: etcd.external.endpoints must name an etcd" -}}
{{- end -}}
{{- $secure := 0 -}}
{{- range .Values.etcd.external.endpoints -}}{{- if hasPrefix "https://" . -}}{{- $secure = add $secure 1 -}}{{- end -}}{{- end -}}
{{- if and $secure (lt (int $secure) (len .Values.etcd.external.endpoints)) -}}
{{- fail "etcd.external.endpoints: all of them must be https://, or none" -}}
{{- end -}}
{{- if and $secure (not .Values.etcd.external.tlsSecret) -}}
{{- fail "etcd.external.endpoints are https://: etcd.external.tlsSecret must name the secret with the authority's ca.crt" -}}
{{- end -}}
{{- .Values.etcd.external.endpoints | toJson -}}
{{- end -}}
{{- end -}}

{{- /* Under which the release's records stand there. */ -}}
{{- define "baton.etcd.prefix" -}}
{{- printf "/baton/%s/%s/" .Release.Namespace .Release.Name -}}
{{- end -}}

{{- /* Whether clients of etcd have files from a secret. */ -}}
{{- define "baton.etcd.tls" -}}
{{- if and (not .Values.etcd.enabled) .Values.etcd.external.tlsSecret -}}true{{- end -}}
{{- end -}}

{{- define "baton.etcd.password" -}}
{{- if and (not .Values.etcd.enabled) .Values.etcd.external.user -}}true{{- end -}}
{{- end -}}

{{- /* Secret with API keys; empty where there is none. */ -}}
{{- define "baton.auth.secret" -}}
{{- if and .Values.auth.existingSecret .Values.auth.keys -}}
{{- fail "auth.existingSecret and auth.keys are both set: the keys can come from one of them" -}}
{{- end -}}
{{- if .Values.auth.keys -}}
{{- include "baton.name" (dict "root" . "part" "keys") -}}
{{- else -}}
{{- .Values.auth.existingSecret -}}
{{- end -}}
{{- end -}}

{{- /* Whether `helm test` can call: with keys it needs one of them, and the chart knows their hashes alone. */ -}}
{{- define "baton.test.can" -}}
{{- if or (not (include "baton.auth.secret" .)) .Values.auth.testKey.secret -}}true{{- end -}}
{{- end -}}

{{- /* Whether `helm test` is to see KV cross pods: the model that it asks has prefill workers, and routers use them. */ -}}
{{- define "baton.test.transfers" -}}
{{- $asked := default (first .Values.models).name .Values.test.model -}}
{{- $found := "" -}}
{{- range include "baton.pools" (dict "root" . "role" "prefill") | fromJsonArray -}}
{{- $names := concat (list .model.name) .model.servedNames -}}
{{- if and (has $asked $names) (or (gt (int .pool.replicas) 0) (ne .pool.autoscaling.kind "none")) -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- if ne .Values.router.prefillPolicy "local" -}}{{- $found -}}{{- end -}}
{{- end -}}

{{- /* Whom `helm test` asks; empty leaves that to the router, which takes the only one. */ -}}
{{- define "baton.test.model" -}}
{{- if .Values.test.model -}}
{{- .Values.test.model -}}
{{- else if gt (len .Values.models) 1 -}}
{{- (first .Values.models).name -}}
{{- end -}}
{{- end -}}
