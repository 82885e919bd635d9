{{/* The release's name, with the chart's unless that is in it and not its end: the releases x and x-afl are two.
Long ones keep a hash, so that two do not become one. */}}
{{- define "afl.name" -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" .Release.Name) }}
{{- fail (printf "the release cannot be called %s: its Services are named after it, and Kubernetes wants a letter first, and no dots" .Release.Name) }}
{{- end -}}
{{- $own := and (contains .Chart.Name .Release.Name) (not (hasSuffix (printf "-%s" .Chart.Name) .Release.Name)) }}
{{- $name := $own | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) -}}
{{- if gt (len $name) 40 }}{{ printf "%s-%s" (trunc 33 $name | trimSuffix "-") (sha256sum $name | trunc 6) }}
{{- else }}{{ $name }}{{ end -}}
{{- end -}}

{{/* What selects this release's objects, and with a component its pods: no other release's. */}}
{{- define "afl.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
{{- define "afl.serverSelector" -}}
{{ include "afl.selector" . }}
app.kubernetes.io/component: server
{{- end -}}
{{- define "afl.workerSelector" -}}
{{ include "afl.selector" . }}
app.kubernetes.io/component: worker
{{- end -}}

{{/* Labels of metadata beside the selector's; not of pods, which would begin again with each version of the chart. */}}
{{- define "afl.chartLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "afl.serverLabels" -}}
{{ include "afl.serverSelector" . }}
{{ include "afl.chartLabels" . }}
{{- end -}}
{{- define "afl.workerLabels" -}}
{{ include "afl.workerSelector" . }}
{{ include "afl.chartLabels" . }}
{{- end -}}

{{- define "afl.serverSecret" -}}
{{ .Values.server.tls.secret | default (printf "%s-server" (include "afl.name" .)) | quote }}
{{- end -}}
{{- define "afl.workerSecret" -}}
{{ .Values.site.tls.secret | default (printf "%s-worker" (include "afl.name" .)) | quote }}
{{- end -}}

{{- define "afl.count" -}}
{{ .Values.site.count | default (.Values.server.enabled | ternary .Values.server.workers 1) | int }}
{{- end -}}

{{- define "afl.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Of a release with both parts, the one that what is for both counts as. */}}
{{- define "afl.watched" -}}
{{ .Values.server.enabled | ternary "server" "worker" }}
{{- end -}}

{{- define "afl.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where the pods of a part may run. */}}
{{- define "afl.scheduling" -}}
{{- range $key := list "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with index $.part $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- with .pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "afl.claim" -}}
accessModes: [ReadWriteOnce]
{{- if not (kindIs "invalid" .className) }}
storageClassName: {{ quote .className }}
{{- end }}
resources: {requests: {storage: {{ toJson .size }}}}
{{- end -}}

{{/* A rule of egress: asking for names. */}}
{{- define "afl.dns" -}}
{{- with .Values.networkPolicy.dns -}}
- to:
    {{- toYaml . | nindent 4 }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}
{{- end -}}
