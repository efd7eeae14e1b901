{{- /* What all nodes of etcd are configured with; how each comes into its cluster is added by its pod. */ -}}
{{- define "baton.etcd.config" -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "ipv6") -}}
data-dir: /data/etcd
{{- $scheme := ternary "https" "http" .Values.identity.enabled }}
listen-client-urls: {{ $scheme }}://{{ $any }}:2379
listen-peer-urls: {{ $scheme }}://{{ $any }}:2380
listen-metrics-urls: http://{{ $any }}:2381
quota-backend-bytes: {{ include "baton.etcd.quota" . }}
# Records are few and small: a history of an hour is more than a router ever asks for.
auto-compaction-mode: periodic
auto-compaction-retention: 1h
{{- if .Values.identity.enabled }}
# Whoever has a certificate of the cluster may call; only nodes of etcd may be its peers.
client-transport-security:
  cert-file: /etc/baton/identity/tls.crt
  key-file: /etc/baton/identity/tls.key
  trusted-ca-file: /etc/baton/identity/ca.crt
  client-cert-auth: true
peer-transport-security:
  cert-file: /etc/baton/identity/tls.crt
  key-file: /etc/baton/identity/tls.key
  trusted-ca-file: /etc/baton/identity/ca.crt
  client-cert-auth: true
  allowed-hostname: [etcd.baton.internal]
  # The name of the role decides, not the address: nodes would have to be found by theirs.
  skip-client-san-verification: true
{{- end }}
{{- end -}}

{{- /* Most bytes that etcd keeps. */ -}}
{{- define "baton.etcd.quota" -}}
{{- $volume := include "baton.bytes" (dict "of" .Values.etcd.persistence.size "key" "etcd.persistence.size") | int64 -}}
{{- $quota := int64 .Values.etcd.quotaBytes -}}
{{- if eq $quota 0 -}}{{- $quota = div $volume 4 -}}{{- end -}}
{{- if ge $quota $volume -}}
{{- fail (printf "etcd.quotaBytes: %d bytes do not fit on a volume of %v (etcd.persistence.size), which would be full before etcd says so" $quota .Values.etcd.persistence.size) -}}
{{- end -}}
{{- $quota -}}
{{- end -}}

{{- /* A quantity of Kubernetes in bytes: dict "of" "key". */ -}}
{{- define "baton.bytes" -}}
{{- $text := toString .of -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if not (hasKey $units $unit) -}}{{- fail (printf "%s: %s is no size" .key $text) -}}{{- end -}}
{{- mulf (float64 $number) (get $units $unit) | int64 -}}
{{- end -}}
