{{- /* Roles whose certificates this release needs, with the further names of each, as JSON. */ -}}
{{- define "baton.identity.roles" -}}
{{- $roles := dict "router" list "worker" list "operator" list -}}
{{- if .Values.etcd.enabled -}}
{{- $etcd := include "baton.name" (dict "root" . "part" "etcd") -}}
{{- $_ := set $roles "etcd" (list (printf "*.%s.%s.svc.%s" $etcd .Release.Namespace .Values.clusterDomain) "localhost") -}}
{{- end -}}
{{- $roles | toJson -}}
{{- end -}}

{{- /* Secret with the certificate of a role: dict "root" "role". */ -}}
{{- define "baton.identity.secret" -}}
{{- default (include "baton.name" (dict "root" .root "part" (printf "identity-%s" .role))) (get .root.Values.identity.secrets .role) -}}
{{- end -}}

{{- /* The role of a component. */ -}}
{{- define "baton.identity.role" -}}
{{- if has . (list "prefill" "decode") -}}worker{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- /* Volume and mount of a component's certificate: dict "root" "component". */ -}}
{{- define "baton.identity.volume" -}}
{{- if .root.Values.identity.enabled -}}
- name: identity
  secret: {secretName: {{ include "baton.identity.secret" (dict "root" .root "role" (include "baton.identity.role" .component)) }}, defaultMode: 0440}
{{- end -}}
{{- end -}}

{{- define "baton.identity.mount" -}}
{{- if .Values.identity.enabled -}}
- {name: identity, mountPath: /etc/baton/identity, readOnly: true}
{{- end -}}
{{- end -}}
