{{- define "immortal.name" -}}
{{- $name := .Values.instance | default .Release.Name -}}
{{- if not (and (le (len $name) 52) (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- fail (printf "%q can't name an instance here: at most 52 of a-z, 0-9 and '-', first a letter; say instance" $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{- define "immortal.selector" -}}
app.kubernetes.io/name: immortal
app.kubernetes.io/instance: {{ include "immortal.name" . }}
{{- end }}

{{- define "immortal.labels" -}}
{{ include "immortal.selector" . }}
app.kubernetes.io/part-of: {{ .Values.fleet }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "immortal.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "immortal.appImage" -}}
{{- with .Values.app.image -}}
{{- if .repository -}}
{{ .repository }}:{{ required "app.image.tag must say which of app.image.repository" .tag }}
{{- else -}}
{{ include "immortal.image" $ }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "immortal.home" -}}
/var/lib/immortal/home
{{- end }}

{{/* Where the app finds its coordinator: one that follows another has a place of its own for it. */}}
{{- define "immortal.appPlace" -}}
{{ include "immortal.home" . }}/{{ include "immortal.name" . }}{{ if .Values.log.postgresql }}/followers/1{{ end }}
{{- end }}

{{/* What Secrets bring, as files of one folder. */}}
{{- define "immortal.secrets" -}}
{{- with .Values.keysSecret }}
- secret: {name: {{ . | quote }}}
{{- end }}
{{- with .Values.log.passwordSecret }}
- secret: {name: {{ . | quote }}, items: [{key: pgpass, path: pgpass}]}
{{- end }}
{{- with .Values.metrics.tokenSecret }}
- secret: {name: {{ . | quote }}, items: [{key: token, path: metrics_token}]}
{{- end }}
{{- end }}

{{- define "immortal.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "immortal.check" -}}
{{- if and (gt (int .Values.replicas) 1) (not .Values.log.postgresql) -}}
{{- fail "replicas: more than one needs a log that all of them reach: say log.postgresql" -}}
{{- end -}}
{{- if and .Values.log.postgresql (not .Values.keysSecret) -}}
{{- fail "keysSecret: with log.postgresql all replicas have the keys of one Secret: make them with 'immortal keys'" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.tokenSecret) -}}
{{- fail "metrics.tokenSecret: without it no metrics are served, and metrics.serviceMonitor finds none" -}}
{{- end -}}
{{- end }}
